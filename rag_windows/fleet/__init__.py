"""Several replicas of the server behind one address, by Ray Serve (extra `fleet`)."""
