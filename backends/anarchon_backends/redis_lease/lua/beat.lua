-- One heartbeat: renews, looks, sweeps and says that the instance lives (S15, S19, S26).

-- `machine.judge_renewal`.
local function renew(renewal, key)
  local run = load_run(key, renewal.job, renewal.slot)
  if not run then
    return { outcome = 'unknown_token' }
  end
  local ours = run.token == renewal.token and is_good(run)
  if not ours or (run.incarnation ~= renewal.incarnation and not renewal.adopt) then
    return { outcome = 'fenced', run = shown(run) }
  end
  if renewal.adopt then
    run.instance_id, run.incarnation = renewal.instance_id, renewal.incarnation
  end
  if renewal.started_at and not run.started_at then
    run.attempt_state, run.started_at = 'running', math.max(renewal.started_at, run.slot)
  end
  run.state = run.attempt_state
  renew_lease(run, renewal.lease_ms)
  if renewal.cancel and run.cancel == '' then
    run.cancel, run.cancelled_at = renewal.cancel, NOW
  end
  save_run(key, run)
  return { outcome = 'renewed', run = shown(run) }
end

local function look(looked, key)
  return { run = shown(load_run(key, looked.job, looked.slot)) }
end

local found, swept = {}, {}

-- Finds the runs of a job that are not final; one whose record cannot be read is nobody's to act on.
local function sweep(watched, key)
  local settled = load_job(key, watched.schedule_id).settled
  if not swept[key] then
    swept[key] = true
    for _, slot in ipairs(open_slots(key)) do
      local run = unless_broken(load_run, key, watched.job, tonumber(slot))
      if run then
        found[#found + 1] = run
      end
    end
  end
  return { settled = text(settled) }
end

local function oldest_takeable_first(a, b)
  local a_is, b_is = takeable(a), takeable(b)
  if a_is ~= b_is then
    return a_is
  end
  if a.slot ~= b.slot then
    return a.slot < b.slot
  end
  return a.job < b.job
end

local answer = {}
local before = 0
for _, part in ipairs({ { 'renewals', renew }, { 'looks', look }, { 'sweep', sweep } }) do
  answer[part[1]] = answers_of(batch[part[1]], part[2], before)
  before = before + #batch[part[1]]
end
table.sort(found, oldest_takeable_first)
answer.unfinished = {}
for i = 1, math.min(#found, batch.sweep_limit) do
  answer.unfinished[i] = shown(found[i])
end
if batch.instance then
  answer.known, answer.twins = say_alive(batch.instance, batch.leaving)
end
return reply(answer)
