"""Derives the labels that a node should have from the reports about its GPUs.

`accelerators` names products and reads other vendors' labels; `sources` weighs the claims of
agents, DRA, labels and instance types; `node_labels` compares the names with the labels of a node;
`feature_discovery` makes NVIDIA's labels.
"""
