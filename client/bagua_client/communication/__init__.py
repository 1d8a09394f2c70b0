"""What goes over the wire: topology, process groups, operations and the pipeline of them."""
