"""How the labeler uses the Kubernetes API.

`projection` turns the API's JSON into the labeler's model; `cluster_api` checks permissions, reads
nodes and writes labels at a limited rate.
"""
