"""The admission webhook: gives pods the FUSE broker's volume, and removes the old resource."""
