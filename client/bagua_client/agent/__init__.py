"""The agent: measures steps, reports them and switches all ranks to what the service proposes."""

from bagua_client.agent.agent import Agent, start_agent

__all__ = ["Agent", "start_agent"]
