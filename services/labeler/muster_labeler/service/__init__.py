"""The service that keeps the labels of all nodes correct.

`reconciler` runs the loop and writes labels; `fleet` stores nodes and inventories; `decisions`
decides what to do about a node, and whether nodes without a label may be labelled;
`decision_publisher` publishes decisions and node conditions.
"""
