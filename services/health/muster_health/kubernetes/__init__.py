"""What health reads from the Kubernetes API, and the only change it may make there.

`watches` follows nodes, DaemonSets and the plugins' pods, from which `membership` derives which
nodes should have which plugin. `queries` answers the detector's questions about a suspected plugin,
and deletes a plugin's pod if that is allowed. `cluster_facts` projects objects to facts.
"""
