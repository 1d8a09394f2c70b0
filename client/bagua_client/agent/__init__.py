"""The agent: measures steps, reports them and switches all ranks to what the service proposes."""

from bagua_client.agent.admission import is_admitted, start_agent
from bagua_client.agent.agent import Agent, State

__all__ = ["Agent", "State", "is_admitted", "start_agent"]
