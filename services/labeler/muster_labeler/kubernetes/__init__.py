"""The Kubernetes API as the labeler uses it.

`projection` turns its JSON into the labeler's model; `cluster_api` asks for rights, reads nodes and
writes labels, at a set pace.
"""
