"""Where engines come from, if not from a fixed list: DNS and Kubernetes."""
