"""The loopback hub for every test of this folder."""

from tests.hub.loopback import hub as hub
