"""Derives the labels that a node should have from what is reported of its GPUs.

`accelerators` names a product; `schemes` reads other vendors' labels and instance types; `sources`
weighs what agents, DRA and labels say; `node_labels` compares that with the labels of a node;
`feature_discovery` makes NVIDIA's labels.
"""
