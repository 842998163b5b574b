"""What this agent says it runs."""

SOFTWARE = "flexband-agent/0.1.0"
