"""The admission webhook: adds the FUSE broker's volume to pods, and removes the old resource."""
