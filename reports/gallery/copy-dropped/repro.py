"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   v: [1, 2] = input
#   clone: [1, 2] = clone(v)
#   add_: [1, 2] = add_.Tensor(v, 1.0)
#   sub: [1, 2] = sub.Tensor(clone, v)
#   return sub

PASS = 'tests.mutants.foreign_local:CopyDropped'
OPTIONS = {}
CONTRACT = {
    'metadata': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"v","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"clone","op":"call_function","target'
    '":"aten::clone","args":[{"node":"v"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":'
    '1}},{"name":"add_","op":"call_function","target":"aten::add_.Tensor","args":[{"node":"v"},1.0],"val"'
    ':{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"sub","op":"call_function","tar'
    'get":"aten::sub.Tensor","args":[{"node":"clone"},{"node":"v"}],"val":{"shape":[1,2],"stride":[2,1],"'
    'dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","args":[{"node":"sub"}]}]}],'
    '"ranks":[{"graph":0,"constants":{}},{"graph":0,"constants":{}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
