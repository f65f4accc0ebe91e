"""One serving instance: its model, admission control, state, scheduler, and threads."""
