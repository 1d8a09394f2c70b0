"""One run of the user's job: started, ended with all of its processes, measured."""
