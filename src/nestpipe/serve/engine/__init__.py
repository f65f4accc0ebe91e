"""One serving instance: its scheduler, its queues and its threads."""
