"""What a flow run tells its Prefect server and hears from it: pages, progress, approval, slots, cancellation."""
