"""Mounts and unmounts: the system calls, and the mounter, which forks a child for each job."""
