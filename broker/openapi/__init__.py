"""The description of the HTTP API in OpenAPI 3.1: what routes there are, what they take, what they may answer.

operations   one entry for each route, in words and schemas      schemas   the JSON forms
errors       which codes a route may answer, with their status   build     all of it put together
"""

from broker.openapi.build import description

__all__ = ["description"]
