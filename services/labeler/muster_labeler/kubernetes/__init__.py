"""How the labeler uses the Kubernetes API.

`projection` turns its JSON into the labeler's model; `cluster_api` asks for rights, reads nodes and
writes labels, at a set pace.
"""
