"""What can be tuned, whatever keeps it together: the interface, the vote on a change, the record
of a step."""
