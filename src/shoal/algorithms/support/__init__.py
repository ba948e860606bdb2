"""What several algorithms share: retries, rejoining, servers, fragments, requirements of an experiment."""
