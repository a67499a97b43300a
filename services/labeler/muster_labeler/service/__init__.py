"""The running service: it keeps the labels of all nodes as they should be.

`reconciler` is the loop; `fleet` remembers nodes and inventories; `decisions` says what to do with
a node, and whether any first label may be written; `label_writer`, `node_conditions` and
`decision_publisher` carry decisions out.
"""
