"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   row: [1, 2] = input
#   neg: [1, 2] = neg(row)
#   neg_1: [1, 2] = neg(row)
#   return (neg, neg_1)

PASS = 'tests.mutants.foreign_local:ReturnedAsOne'
OPTIONS = {}
CONTRACT = {}
KIND = 'wrong-alias'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"row","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"unifo'
    'rm","scale":1.0}}],"graphs":[{"nodes":[{"name":"row","op":"placeholder","target":"","args":[],"val":'
    '{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"neg","op":"call_function","targ'
    'et":"aten::neg","args":[{"node":"row"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias'
    '":1}},{"name":"neg_1","op":"call_function","target":"aten::neg","args":[{"node":"row"}],"val":{"shap'
    'e":[1,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","ar'
    'gs":[{"tuple":[{"node":"neg"},{"node":"neg_1"}]}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0'
    ',"constants":{}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
