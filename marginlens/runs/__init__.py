"""The run store: a folder of run folders, and queries on them. No server and no index: the folders hold everything."""
