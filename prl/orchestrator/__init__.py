"""One asyncio process: tasks -> rollouts -> credit -> samples -> batches, never older than allowed."""
