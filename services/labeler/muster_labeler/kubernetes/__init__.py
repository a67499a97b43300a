"""The Kubernetes API as the labeler uses it.

`projection` turns its JSON into the labeler's model; `cluster_api` asks for rights, reads nodes and
writes labels; `pace` spreads those writes over time.
"""
