"""The agent, on the training thread of each rank: it has steps measured, gives what there is to
tell to the reporter, and switches all ranks to what the service proposes."""

from bagua_client.agent.admission import start_agent, why_not_admitted
from bagua_client.agent.job import tell_left_alone
from bagua_client.agent.switching import Agent, State

__all__ = ["Agent", "State", "start_agent", "tell_left_alone", "why_not_admitted"]
