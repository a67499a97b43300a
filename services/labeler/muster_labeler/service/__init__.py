"""The running service, which keeps the labels of all nodes correct.

`reconciler` is the loop, and writes labels; `fleet` remembers nodes and inventories; `decisions`
says what to do with a node, and whether any first label may be written; `decision_publisher`
publishes decisions and node conditions.
"""
