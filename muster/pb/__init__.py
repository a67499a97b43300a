"""Generated protobuf messages and the hand-written gRPC tables of the kubelet's services."""
