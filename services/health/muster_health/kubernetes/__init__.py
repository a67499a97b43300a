"""Reads from the Kubernetes API, and deletes a plugin's pod there if that is allowed.

`watches` follows nodes, DaemonSets and the plugins' pods, from which `membership` derives which
nodes should run which plugin. `queries` answers the detector's queries about a suspected plugin,
and deletes its pod. `cluster_facts` reduces objects to the facts that the detector needs.
`plugin_reader` checks periodically whether plugins that muster does not run work, and
`observed_plugins` derives the observations.
"""
