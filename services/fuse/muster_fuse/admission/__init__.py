"""The admission webhook: gives pods the FUSE broker's volume, and takes the old resource away."""
