"""The paper's tables and figures as data: what to run for each number, what was published, where it stands.

    cell, = find("MoCo/CIFAR10/pos", "tab2")
    cell.settings                           # for marginlens.Pretrain, without a seed
    cell.published                          # 90.663 ± 0.159
    cell.address                            # Tab. 2, row MoCo + pos., column CIFAR10

The paper is "Understanding Contrastive Learning Through the Lens of Margins" (arXiv 2306.11526).
"""

from marginlens.paper.cells import Cell, Published, Table, Value
from marginlens.paper.registry import TABLES, elsewhere, find, readings

__all__ = ["TABLES", "Cell", "Published", "Table", "Value", "elsewhere", "find", "readings"]
