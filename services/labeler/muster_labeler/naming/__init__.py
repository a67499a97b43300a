"""Derives the labels that a node should have from what is reported of its GPUs.

`accelerators` names a product, and reads other vendors' labels; `sources` weighs what agents, DRA,
labels and instance types say; `node_labels` compares that with the labels of a node;
`feature_discovery` makes NVIDIA's labels.
"""
