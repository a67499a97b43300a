"""Mounts and unmounts: the system calls, and the process that forks a child for each job."""
