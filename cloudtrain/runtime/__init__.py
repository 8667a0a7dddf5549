"""The side of cloudtrain that runs on a node, from ``cloudtrain.pyz``: the standard library alone, no torch import."""
