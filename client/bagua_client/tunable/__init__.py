"""What can be tuned, whatever keeps it together: the interface, what all kinds have in common, the
vote on a change, the memory of a device, the record of a step."""
