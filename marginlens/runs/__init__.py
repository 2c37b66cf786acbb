"""The run store: a folder of run folders, and what is asked of it. No server, no index: the folders say it all."""
