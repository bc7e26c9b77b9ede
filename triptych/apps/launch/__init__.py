"""Starting and supervising the cluster's processes on one machine."""
