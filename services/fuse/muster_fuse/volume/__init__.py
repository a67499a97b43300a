"""The CSI driver: provides each pod with a volume that contains the helper and the pod's socket."""
