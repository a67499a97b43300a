"""Mounts and unmounts: the system calls, the process that forks a child for each job."""
