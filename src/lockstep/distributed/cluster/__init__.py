"""Description of a cluster: tasks, addresses, ports and roles of its processes."""
