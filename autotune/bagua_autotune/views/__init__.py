"""What every view (API, page, terminal, metrics) shows of jobs, and how it is made. Reads only.

Each type is what goes over the wire: ``/api/v2`` writes them as JSON, its OpenAPI document is made
from them, and the command line reads them back.
"""

from __future__ import annotations

from bagua_autotune.model.job import Event
from bagua_autotune.model.received import TrialProfile
from bagua_autotune.tuning.status import JobState
from bagua_autotune.views.curve import Curve
from bagua_autotune.views.lists import (
    EventList,
    JobDetail,
    ObservationList,
    ObservationView,
    Page,
    ProfileList,
    ShownTrial,
    TrialList,
    TrialView,
    WrongPage,
    all_pages,
    event_list,
    every_event,
    every_observation,
    every_trial,
    observation_list,
    profile_list,
    trial_list,
)
from bagua_autotune.views.overviews import JobBuckets, JobList, JobOverview, Overviews
from bagua_autotune.views.speedup import Figures
from bagua_autotune.views.steps import StepSeries
from bagua_autotune.views.summary import JobSum, JobSummary, Life, Summaries, name_life

__all__ = [
    "Curve",
    "Event",
    "EventList",
    "Figures",
    "JobBuckets",
    "JobDetail",
    "JobList",
    "JobOverview",
    "JobState",
    "JobSum",
    "JobSummary",
    "Life",
    "ObservationList",
    "ObservationView",
    "Overviews",
    "Page",
    "ProfileList",
    "ShownTrial",
    "StepSeries",
    "Summaries",
    "TrialList",
    "TrialProfile",
    "TrialView",
    "WrongPage",
    "all_pages",
    "event_list",
    "every_event",
    "every_observation",
    "every_trial",
    "name_life",
    "observation_list",
    "profile_list",
    "trial_list",
]
