"""Reads from the Kubernetes API, and makes the only change that health may make there.

`watches` follows nodes, DaemonSets and the plugins' pods, from which `membership` derives which
nodes should run which plugin. `queries` answers the detector's queries about a suspected plugin,
and deletes a plugin's pod if that is allowed. `cluster_facts` reduces objects to the facts that the
detector needs.
"""
