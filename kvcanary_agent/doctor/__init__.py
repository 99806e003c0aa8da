"""``kvcanary-agent doctor``: what is here, which ways in work, and what each process of a server is covered for."""
