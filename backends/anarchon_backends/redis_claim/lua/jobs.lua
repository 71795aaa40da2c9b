-- What is kept of a job beside its runs, for the scripts that stand after this text.

local function load_job(key)
  local values = read(key, 'HMGET', key, 'floor', 'definition_id', 'schedule_id', 'definition_at',
    'paused_at')
  return {
    floor = number(key, values[1], -1),
    definition_id = values[2] or '',
    schedule_id = values[3] or '',
    definition_at = number(key, values[4], 0),
    paused_at = number(key, values[5], nil),
  }
end

-- By incarnation, what instances hold of the job: lists of {definition_id, schedule_id}.
local function load_holds(key)
  local holds, all = {}, read(key .. ':holds', 'HGETALL', key .. ':holds')
  for i = 1, #all, 2 do
    local fine, held = pcall(cjson.decode, all[i + 1])
    holds[all[i]] = fine and type(held) == 'table' and held or {}
  end
  return holds
end

-- Those of the holds that count: `batch.live` has the instances that live.
local function live_of(holds)
  local live = {}
  for incarnation, held in pairs(holds) do
    for _, hold in ipairs(batch.live[incarnation] and held or {}) do
      live[#live + 1] = hold
    end
  end
  return live
end
