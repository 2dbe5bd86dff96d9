"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [2, 2] = input
#   send = send(x, 1)
#   recv: [2, 2] = recv(x, 1)
#   all_to_all_single: [2, 2] = all_to_all_single(recv, [1, 1], [1, 1], 'tp')
#   wait_tensor: [2, 2] = wait_tensor(all_to_all_single)
#   return x

PASS = 'tests.mutants.overlap:EffectsAreCompute'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'order': True,
    'collective_order': True,
}
KIND = 'deadlock'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"x","shape":[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform'
    '","scale":1.0}}],"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"sh'
    'ape":[2,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"send","op":"call_function","target"'
    ':"p2p::send","args":[{"node":"x"},{"rank_constant":"previous"}],"val":{"scalar":null}},{"name":"recv'
    '","op":"call_function","target":"p2p::recv","args":[{"node":"x"},{"rank_constant":"next"}],"val":{"s'
    'hape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"all_to_all_single","op":"call_func'
    'tion","target":"_c10d_functional::all_to_all_single","args":[{"node":"recv"},[1,1],[1,1],"tp"],"val"'
    ':{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"wait_tensor","op":"call_functi'
    'on","target":"_c10d_functional::wait_tensor","args":[{"node":"all_to_all_single"}],"val":{"shape":[2'
    ',2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","args":['
    '{"node":"x"}]}]},{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"shape":[2,2]'
    ',"stride":[2,1],"dtype":"float32","alias":0}},{"name":"recv","op":"call_function","target":"p2p::rec'
    'v","args":[{"node":"x"},{"rank_constant":"next"}],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float'
    '32","alias":1}},{"name":"send","op":"call_function","target":"p2p::send","args":[{"node":"x"},{"rank'
    '_constant":"previous"}],"val":{"scalar":null}},{"name":"all_to_all_single","op":"call_function","tar'
    'get":"_c10d_functional::all_to_all_single","args":[{"node":"recv"},[1,1],[1,1],"tp"],"val":{"shape":'
    '[2,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"wait_tensor","op":"call_function","targe'
    't":"_c10d_functional::wait_tensor","args":[{"node":"all_to_all_single"}],"val":{"shape":[2,2],"strid'
    'e":[2,1],"dtype":"float32","alias":2}},{"name":"output","op":"output","target":"","args":[{"node":"x'
    '"}]}]}],"ranks":[{"graph":0,"constants":{"next":1,"previous":1}},{"graph":1,"constants":{"next":0,"p'
    'revious":0}}],"seed":0,"labels":["functional","any","all-to-all","barrier","exchange","rank-dependen'
    't","swapped","update","timed"]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
