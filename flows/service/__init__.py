"""What stands between runs: Prefect servers, the deployments on them, `headrace up`, and the process of a flow run."""
