"""Memory that training keeps from step to step: noticed, looked for, and named."""
