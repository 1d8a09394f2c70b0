"""What every view (API, page, terminal, metrics) shows of jobs, and how it is made. Reads only.

Each type is what goes over the wire: ``/api/v2`` writes them as JSON, its OpenAPI document is made
from them, and the command line reads them back.
"""
