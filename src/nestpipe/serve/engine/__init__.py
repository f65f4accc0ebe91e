"""One serving instance: admission control, state, scheduler, the threads that compute and copy."""
