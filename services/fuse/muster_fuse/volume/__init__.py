"""Gives each pod, through the kubelet, a volume with the helper and the pod's socket."""
